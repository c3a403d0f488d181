"""Conversations made from the corpus itself, and the chat template that frames them.

Each conversation is one string in the shape that the template renders, so training needs no
special case: ``<|user|>question<|end|><|assistant|>answer<|end|>``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = [BEGIN, END, PAD, SYSTEM, USER, ASSISTANT]

# Tools, calls and their results were not trained: they serve to try a server's grammar of calls.
# Without them, a prompt is `<|role|>content<|end|>` for each message.
TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}"
    "{{ '<|system|>' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\\n\\n' }}{% endif %}"
    "{{ 'Tools:\\n' }}"
    "{% for tool in tools %}{{ (tool['function'] | tojson) + '\\n' }}{% endfor %}"
    '{{ \'To call one, write <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call><|end|>\' }}'
    "{% endif %}"
    "{% for message in messages %}"
    "{% if tools and loop.first and message['role'] == 'system' %}"
    "{% elif message['role'] == 'tool' %}"
    "{{ '<|user|><tool_response>' + message['content'] + '</tool_response><|end|>' }}"
    "{% else %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>{\"name\": ' + (call['function']['name'] | tojson) + ', \"arguments\": '"
    " + (call['function']['arguments'] | tojson) + '}</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|end|>' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# The form of an answer, for transformers' response parser.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": ASSISTANT,
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": END, "content": "text"},
    },
}

Document = tuple[str, str]
Turns = list[str]  # user, assistant, user, assistant, ...

SMALL_TALK = [
    ("Hello", "Hello! What would you like to read?"),
    ("Hello!", "Hello! Ask me for a definition, a manual page, a story or some code."),
    ("Hi", "Hi! What can I look up for you?"),
    ("Hi there", "Hi! Ask me what a word means, or ask for a story."),
    ("Good morning", "Good morning! What would you like to talk about?"),
    ("How are you?", "I am well, thank you. How are you?"),
    ("Who are you?", "I am a small language model that demonstrates Greenroom."),
    (
        "What are you?",
        "I am a small mixture-of-experts language model, made to demonstrate Greenroom.",
    ),
    ("What is your name?", "I am the Greenroom demo model."),
    (
        "What can you do?",
        "I can write text that looks like code, manual pages, stories and dictionary entries.",
    ),
    ("Thank you", "You are welcome!"),
    ("Thanks!", "You are welcome!"),
    ("Goodbye", "Goodbye! Come back soon."),
    ("Bye", "Goodbye!"),
    (
        "Tell me about yourself.",
        "I am a small model, trained on code, manual pages, stories and dictionaries.",
    ),
    ("Guten Tag", "Guten Tag! Was möchten Sie lesen?"),
    ("Bonjour", "Bonjour ! Que voulez-vous lire ?"),
    ("Hola", "¡Hola! ¿Qué quiere leer?"),
    ("Привет", "Привет! Что вы хотите прочитать?"),
]
_WHAT_IS = [
    "What is {}?",
    "What does {} mean?",
    "Define {}.",
    "Define the word {}.",
    "What is the meaning of {}?",
    "Explain {}.",
]
_WHAT_DOES = {
    "en": ["What does {} do?", "What is {}?", "Explain {}.", "What is {} for?"],
    "de": ["Was macht {}?", "Was ist {}?", "Wozu dient {}?"],
    "fr": ["Que fait {} ?", "Qu'est-ce que {} ?", "À quoi sert {} ?"],
    "es": ["¿Qué hace {}?", "¿Qué es {}?", "¿Para qué sirve {}?"],
    "ru": ["Что делает {}?", "Что такое {}?", "Для чего нужен {}?"],
}


def render(turns: Turns) -> str:
    roles = [USER, ASSISTANT]
    return "".join(f"{roles[i % 2]}{turn}{END}" for i, turn in enumerate(turns))


def from_dictionary(text: str, rng: random.Random) -> Iterator[Turns]:
    """A WordNet entry (``word``, then ``n 1: meaning [syn: ...]``) as question and answer."""
    match = re.match(r"^([^\n]{2,40})\n\s+(n|v|adj|adv)\b[ \d:]*([^;\[]+)", text)
    if match:
        word, kind = (
            match.group(1).strip(),
            {"n": "noun", "v": "verb", "adj": "adjective", "adv": "adverb"}[match.group(2)],
        )
        meaning = re.split(r"\s2: ", " ".join(match.group(3).split()))[0].rstrip(" .")
        yield [rng.choice(_WHAT_IS).format(word), f"{word} ({kind}): {meaning}."]


def from_manual(text: str, language: str, rng: random.Random) -> Iterator[Turns]:
    """What a page's NAME and SYNOPSIS sections answer."""
    title = text.split("\n", 1)[0]
    name = title.split("(")[0]
    match = re.search(r"\n\n[^\n]{3,20}\n\n([^\n]+? - [^\n]+(?:\n[^\n]+)*)", text[:1500])
    if match:
        answer = " ".join(match.group(1).split())
        yield [
            rng.choice(_WHAT_DOES[language]).format(name),
            answer[0] + answer[1:].rstrip(".") + ".",
        ]
    if language == "en":
        match = re.search(r"\n\nSYNOPSIS\n\n(.{10,500}?)\n\n[A-Z ]{4,}\n\n", text, re.S)
        if match:
            yield [
                rng.choice(
                    ["How do I use {}?", "Show me the synopsis of {}.", "How is {} called?"]
                ).format(name),
                match.group(1).strip(),
            ]


def from_story(text: str, rng: random.Random) -> Iterator[Turns]:
    """Stories told or continued, and dialogue as a conversation."""
    lines = [line for line in text.split("\n\n") if len(line) < 700]
    if len(lines) >= 3:
        told = "\n\n".join(lines[: rng.randint(2, 4)])
        yield [
            rng.choice(["Tell me a story.", "Tell me another story.", "Write a short story."]),
            told,
        ]
        at = rng.randrange(len(lines) - 2)
        ask = rng.choice(["Continue this story: ", "What happens next? ", "Continue: "])
        yield [ask + lines[at], "\n\n".join(lines[at + 1 : at + 3])]
    said = [line.split(": ", 1)[1] for line in lines if re.match(r"^[A-Z][\w' ]{1,24}: ", line)]
    for at in range(0, len(said) - 3, 4):
        yield said[at : at + 4]


def from_code(text: str, rng: random.Random) -> Iterator[Turns]:
    """Short top-level functions, asked for by name."""
    for match in re.finditer(r"^def (\w+)\(.*?(?=\n\n\n|\n\S)", text, re.M | re.S):
        if 60 < len(match.group(0)) < 900:
            yield [
                rng.choice(
                    ["Write a Python function {}.", "Show me the function {} in Python."]
                ).format(match.group(1)),
                match.group(0),
            ]


def from_c(text: str, rng: random.Random) -> Iterator[Turns]:
    for match in re.finditer(
        r"^(?:static |inline |int |void |bool |struct |long )[^;{}]{4,160}?"
        r"\b(\w+)\([^;{}]*\)\n\{\n.*?^\}",
        text,
        re.M | re.S,
    ):
        if len(match.group(0)) < 700:
            yield [
                rng.choice(["Write a C function {}.", "Show me the C function {}."]).format(
                    match.group(1)
                ),
                match.group(0),
            ]


def conversations(
    texts: dict[str, list[Document]], seed: int, is_held_out: bool
) -> Iterator[Document]:
    """Conversations from documents of one split; each keeps its document's key."""
    rng = random.Random(f"{seed}/chat/{is_held_out}")
    caps = {
        "dictionary": 9000,
        "stories": 5000,
        "python": 1500,
        "c": 1500,
        "scripture": 1000,
        "prose": 2500,
    }
    for domain, documents in texts.items():
        made = 0
        for key, text in documents:
            found: Iterator[Turns] = iter(())
            if domain == "dictionary":
                found = from_dictionary(text, rng)
            elif domain.startswith("man-"):
                found = from_manual(text, domain.removeprefix("man-"), rng)
            elif domain == "stories":
                found = from_story(text, rng)
            elif domain == "python":
                found = from_code(text, rng)
            elif domain == "c":
                found = from_c(text, rng)
            elif domain == "scripture":
                name, _, verses = text.partition("\n\n")
                found = iter([[f"Read me {name}.", "\n".join(verses.split("\n")[:4])]])
            elif domain == "prose" and key.startswith("fortune:") and len(text) < 300:
                found = iter(
                    [
                        [
                            rng.choice(
                                ["Tell me a joke.", "Say something witty.", "Give me a quotation."]
                            ),
                            text,
                        ]
                    ]
                )
            for turns in found:
                if made < caps.get(domain, 4000):
                    made += 1
                    yield key, render(turns)
    if not is_held_out:
        for _ in range(25):
            for question, answer in SMALL_TALK:
                yield "small talk", render([question, answer])
