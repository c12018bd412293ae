"""Sixty texts that tokenizers are known to disagree about, by name. Characters that do not show are escaped."""

from __future__ import annotations

WORDS = {
    "prose": "Hello, world! To Sherlock Holmes she is always the woman.",
    "contractions": "It's we'll THEY'RE can't you'Ve o'clock 'tis 'TWAS 'Sofar I'msure 'LLama x'tx x'dx he'Rewe ''s",
    "typographic quotes": "don’t ‘quoted’ “double”—dash… end–end",
    "composed": "na\u00efve caf\u00e9 \u00c5se \u00d8re \u00df \u1e9e fi\ufb01nal",
    "decomposed": "nai\u0308ve cafe\u0301 A\u030ase e\u0323\u0302 e\u0302\u0323",
    "compatibility characters": "\u212b \u2126 \uf900 \u0958 \u2f00 \ufb03 \u1e9b\u0323",
    "Vietnamese": "Tiếng Việt: Tie\u0302\u0301ng Vie\u0323\u0302t",
    "Cyrillic with stress": "за\u0301мок и замо\u0301к, й и\u0306",
    "Greek": "Ἐν ἀρχῇ ἦν ὁ λόγος· α\u0313\u0301 \u0390",
    "small alphabets": "ქართული Հայերեն ᏣᎳᎩ ᐃᓄᒃᑎᑐᑦ",
}
SCRIPTS = {
    "Chinese": "今天天气很好，我们去公园吧！「引用」《书名》",
    "Japanese": "漢字かな交じり文。カタカナーﾊﾝｶｸ、か\u3099",
    "Korean": "한국어 문장입니다. \u1112\u1161\u11ab\u1100\u116e\u11a8",
    "Thai": "สวัสดีครับ ผมชื่ออเล็กซ์ น้ำ",
    "Hindi": "नमस्ते दुनिया। हिन्दी में लिखा, क्षत्रिय",
    "Tamil": "வணக்கம் உலகம், தமிழ் எழுத்து",
    "Bengali": "বাংলা লেখা ১২৩, কো ক\u09c7\u09be",
    "Arabic": "مَرْحَبًا بِالعَالَم، ٣٤٥ يوم",
    "Hebrew": "שָׁלוֹם עוֹלָם, \u05e9\u05c1\u05b8",
    "Persian": "می\u200cخواهم بروم\u200c، ۱۲۳۴",
    "Burmese and Khmer": "မြန်မာဘာသာ ភាសាខ្មែរ",
    "bidirectional marks": "a\u200fb\u200e \u202bאב\u202c soft\u00adhyphen wo\u2060rd",
}
SYMBOLS = {
    "emoji": "🐝 bees 🐝🐝!🎉 ok",
    "emoji in words": "a🐝b c🐝d🎉9🎉",
    "joined emoji": "👩\u200d👩\u200d👧\u200d👦 👍🏽 🧑🏿\u200d🚀x",
    "flags and keycaps": "🇩🇪🇯🇵 1\ufe0f\u20e3 #\ufe0f\u20e3 🏴\U000e0067\U000e0062\U000e007f",
    "variation selectors": "❤ ❤\ufe0f ☺\ufe0e 葛\U000e0100",
    "astral letters": "𝒳𝓎 𐌰𐌱 𒀀 𠮷野家 🅰",
    "marks alone": "\u0301 \u0301a .\u0301. 1\u0301 \n\u0301 \u20dd",
    "many marks": "Z\u0351\u036b\u0343a\u0340\u0321\u0321l\u0348g\u0324o\u0321\u0329 t\u0315",
    "private and last": "\ue000\U000f0000\uffff x\U0010fffd\U0010ffff",
    "unassigned": "\u0378a \u0378\u0379 \U0003fffd9",
    "mathematics": "∀x∈ℝ: √x²≥0 ⇒ ∑ᵢ aᵢ ≠ ∞ ±1 µm",
    "punctuation runs": "!!!???...---===///\\\\\\### ,;: ¿¡ …?!\n\n",
}
BLANKS = {
    "empty": "",
    "runs of spaces": "a b  c   d    e     f",
    "trailing spaces": "end   ",
    "leading spaces": "   start",
    "only spaces": "       ",
    "tabs": "\ta\t\tb \tc\t d\t",
    "newlines": "\n\na\n\n\nb\n",
    "carriage returns": "a\r\nb\r\n\r\nc\rd\n\r",
    "spaces at line ends": "a  \n  b \n\n   c.\n  \n",
    "other blanks": "a\u00a0b\u2003c\u3000d\u200be\u0085f\u2028g\u2029h\x0bi\x0cj",
    "byte order mark": "\ufeffhead \ufeff\ufefftail",
    "control characters": "\x00\x01\x07\x1b[31mred\x1b[0m\x7f\x00",
}
CODE = {
    "Python": 'def f(x: int) -> str:\n    """Doc."""\n    if x >= 10:\n        return f"{x!r}"\n\n\n# end\n',
    "C": "#include <stdio.h>\nint main(void)\n{\n\tfor (int i = 0; i < n; ++i) a[i] += *p++;\n}\n",
    "JSON": '{"a": [1, -2.5e+3, null], "b": {"c\\u00e9": "\\n"}, "":true}',
    "markup": '<p class="x">a&nbsp;b<br/></p>\n<!-- c -->\n| a | b |\n|---|:-:|\n**bold**_it_',
    "shell": "$ find . -name '*.py' | xargs grep -n \"x\" > /dev/null 2>&1 && echo $?\n",
    "identifiers": "snake_case camelCase HTTPServer2 __init__ x1y2 a.b.c::d->e @at $var",
    "addresses": "https://example.org/a?b=c&d=%20#e me+you@example.org C:\\Temp\\x ~/.cache",
}
NUMBERS = {
    "numbers": "0 12 345 6789 1,234,567.89 1e-9 0xFF 3.14159 100% $5 №7",
    "other digits": "２０２６年 ½ ² Ⅷ ① ٣٤٥ १२३ 〇 ௰ 𝟙",
}
SPECIAL = {
    "a turn": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "thoughts in words": "x<think>y</think>z <think> </think><think>",
    "blanks around": "  <|im_end|>  \n<|endoftext|>\n  <think>\u0301",
    "nearly special": "<|im_end| <|im_end |> <| im_end|> <|IM_END|> <|im_<|im_end|>end|> <<think>> <think",
    "a tool call": '<tool_call>\n{"name": "搜索", "arguments": {"q": "<|im_end|>"}}\n</tool_call>',
}
TEXTS = WORDS | SCRIPTS | SYMBOLS | BLANKS | CODE | NUMBERS | SPECIAL
