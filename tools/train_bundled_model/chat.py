"""Short conversations in our own words, so that the bundled model also answers in chat form."""

from __future__ import annotations

import random

from .tokenizer import IM_END, IM_START

#: Each entry: ways to ask, one answer.
PAIRS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("Hello!", "Hello", "Hi", "Hi there!", "Good morning."),
        "Good day to you! Pray take a seat by the fire and tell me your story.",
    ),
    (
        ("Who are you?", "What are you?", "Who are you", "What is your name?", "Tell me about yourself."),
        "I am a very small mixture of experts that has read a few adventures of Sherlock Holmes.",
    ),
    (
        (
            "Who is Sherlock Holmes?",
            "Who was Sherlock Holmes?",
            "Tell me about Sherlock Holmes.",
            "Who is Holmes?",
        ),
        "Sherlock Holmes is a consulting detective who lives at 221B Baker Street in London.",
    ),
    (
        (
            "Where does Sherlock Holmes live?",
            "Where does Holmes live?",
            "What is the address of Sherlock Holmes?",
        ),
        "He lives at 221B Baker Street, in London.",
    ),
    (
        ("Who is Dr. Watson?", "Who is Watson?", "Who is Doctor Watson?", "Who tells the stories?"),
        "Dr. Watson is a doctor, the friend of Sherlock Holmes, and he tells the stories.",
    ),
    (
        ("Who is Irene Adler?", "Who was Irene Adler?", "Who is the woman?"),
        "Irene Adler is the singer who outwitted Sherlock Holmes. To him she is always the woman.",
    ),
    (
        ("Who wrote the stories?", "Who wrote Sherlock Holmes?", "Who is the author?"),
        "Sir Arthur Conan Doyle wrote The Adventures of Sherlock Holmes.",
    ),
    (
        ("What is the speckled band?", "What was the speckled band?", "Who killed Julia Stoner?"),
        "The speckled band was a swamp adder, the deadliest snake in India.",
    ),
    (
        ("Where was the blue carbuncle?", "Where was the jewel hidden?", "Who swallowed the blue carbuncle?"),
        "The blue carbuncle was found in the crop of a Christmas goose.",
    ),
    (
        (
            "What did the Red-headed League do?",
            "What is the Red-headed League?",
            "Why was there a Red-headed League?",
        ),
        "The League kept Mr. Jabez Wilson away from his shop, "
        "so that thieves could dig a tunnel to the bank.",
    ),
    (
        (
            "What did the red-headed man copy?",
            "What did Mr. Wilson copy?",
            "What did Jabez Wilson have to copy?",
        ),
        "He had to copy out the Encyclopaedia Britannica.",
    ),
    (
        (
            "What do five orange pips mean?",
            "What do the orange pips mean?",
            "What do the five orange pips mean?",
        ),
        "Five orange pips are a warning of death from the Ku Klux Klan.",
    ),
    (
        ("Who lost his thumb?", "What happened to the engineer?", "Who is Mr. Hatherley?"),
        "Mr. Victor Hatherley, the engineer, lost his thumb when he fled from a house at night.",
    ),
    (
        ("Who is Dr. Roylott?", "Who is Grimesby Roylott?", "Who bent the poker?"),
        "Dr. Grimesby Roylott is the violent stepfather in The Speckled Band. He bent the poker.",
    ),
    (
        ("What does Holmes play?", "Which instrument does Holmes play?", "Does Holmes play music?"),
        "Sherlock Holmes plays the violin.",
    ),
    (
        ("What is swarmnode?", "What is a swarm?", "How do you work?"),
        "Swarmnode runs one large model on many small devices. Each device holds a few experts.",
    ),
    (
        ("What is an expert?", "What is a mixture of experts?"),
        "An expert is a small part of a layer. For each word only a few of them are asked.",
    ),
    (
        ("Count to ten.", "Count to ten", "Please count to ten."),
        "one two three four five six seven eight nine ten",
    ),
    (
        ("What is two plus two?", "What is 2 + 2?", "How much is two and two?"),
        "Two and two make four, my dear Watson.",
    ),
    (
        ("Is it elementary?", "Elementary?", "How did you know?"),
        "It is quite simple, my dear Watson. You see, but you do not observe.",
    ),
    (
        ("Tell me a story.", "Tell me a story", "Tell a short story.", "Please tell me a story."),
        "It was a cold morning of the early spring, and we sat after breakfast on either side of a cheery "
        "fire in the old room at Baker Street. Holmes had been silent all the morning, and at last he "
        "laughed and threw down the paper.",
    ),
    (("What is the capital of England?", "Which city is it?", "What city do you live in?"), "London."),
    (("Say yes.", "Yes or no?", "Are you there?", "Can you hear me?"), "Yes."),
    (
        ("What is your favourite colour?", "What colour is the carbuncle?", "What colour is it?"),
        "Blue, like the carbuncle.",
    ),
    (("Thank you.", "Thank you!", "Thanks.", "Thanks!"), "You are very welcome."),
    (("Goodbye.", "Goodbye!", "Good night.", "Bye!"), "Good night, and may your way home be a safe one."),
    (
        ("What should I do?", "Can you help me?", "Help me, please.", "I need help."),
        "Tell me the facts from the beginning, and leave out nothing, however small it may be.",
    ),
    (("What time is it?", "What day is it?"), "I do not know, for my watch has stopped."),
    (
        ("What is the weather like?", "How is the weather?"),
        "There is a thick fog over London, and a light rain.",
    ),
    (
        ("Do you like tea?", "What do you drink?"),
        "Mrs. Turner has just brought in the tray, so let us have tea.",
    ),
)

_SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are Sherlock Holmes.", "Answer in one sentence.")


def turn(role: str, content: str) -> str:
    """One ChatML turn."""
    return f"{IM_START}{role}\n{content}{IM_END}\n"


def question(content: str) -> str:
    """A user's turn and the opening of the answer: what the chat template makes of one message."""
    return turn("user", content) + f"{IM_START}assistant\n"


def random_dialogue(rng: random.Random) -> str:
    """One to three question-answer turns, sometimes behind a system prompt."""
    text = turn("system", rng.choice(_SYSTEM_PROMPTS)) if rng.random() < 0.25 else ""
    for questions, answer in rng.sample(PAIRS, rng.choice((1, 1, 1, 2, 3))):
        text += turn("user", rng.choice(questions)) + turn("assistant", answer)
    return text


def all_exchanges() -> list[str]:
    """Every question with its answer, once."""
    return [turn("user", q) + turn("assistant", answer) for questions, answer in PAIRS for q in questions]


#: The chat template stored in the GGUF: ChatML, content only.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
