"""Who is there and what they hold, told from node to node: signed records, a last-writer-wins table, an overlay that
spreads news, anti-entropy that repairs. Pure: time and chance come in as arguments, messages go out as values.

docs/gossip.md has the rules and the reasons.
"""
