"""Short chats whose answers follow from the question: sums, lists, counting, tables, copying."""

from typing import NamedTuple

from tools.train.tasks.dialog import CALL, Dialog, Document
from tools.train.tasks.source import Source

COPY_THOUGHT = "I copy the text."


class Exchange(NamedTuple):
    question: str
    answer: str
    thought: str


def chat(source: Source) -> Document:
    """One to five exchanges; loss on the answers."""
    dialog = Dialog(source)
    dialog.system()
    for _ in range(source.rng.randint(1, 5)):
        exchange = small_talk(source)
        dialog.user(exchange.question)
        dialog.assistant(exchange.answer, exchange.thought, CALL)
    return dialog.document()


def small_talk(source: Source) -> Exchange:
    kinds = (arithmetic, repetition, word_list, counting, single_word, greeting, copying, table)
    weights = (5, 1, 2, 1, 3, 1, 2, 2)
    return source.rng.choices(kinds, weights)[0](source)


def some_words(source: Source) -> list[str]:
    return [source.word() for _ in range(source.rng.randint(3, 7))]


def arithmetic(source: Source) -> Exchange:
    rng = source.rng
    operator = rng.choices("+-*", (2, 2, 1))[0]
    if operator == "*":
        a, b = rng.randint(0, 12), rng.randint(0, 12)
        result = a * b
    else:
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        if operator == "-":
            a, b = max(a, b), min(a, b)
        result = a + b if operator == "+" else a - b
    return Exchange(f"What is {a} {operator} {b}?", str(result), f"{a} {operator} {b} = {result}.")


def repetition(source: Source) -> Exchange:
    words = " ".join(some_words(source))
    head = source.rng.choice(("Repeat after me: ", "Say exactly: ", "Repeat: "))
    return Exchange(head + words, words, "I repeat the words.")


def word_list(source: Source) -> Exchange:
    words = some_words(source)
    if source.chance(0.5):
        question = f"List these words, one a line: {', '.join(words)}"
        return Exchange(question, "\n".join("- " + word for word in words), "I list the words.")
    question = f"Reverse the order of these words: {', '.join(words)}"
    return Exchange(question, ", ".join(reversed(words)), "I start from the last word.")


def counting(source: Source) -> Exchange:
    rng = source.rng
    first = rng.randint(0, 40)
    last = first + (rng.randint(2, 12) if source.chance(0.7) else rng.randint(12, 90))
    return Exchange(f"Count from {first} to {last}.", ", ".join(map(str, range(first, last + 1))), "I count.")


def single_word(source: Source) -> Exchange:
    words = some_words(source)
    listed = ", ".join(words)
    match source.rng.randrange(3):
        case 0:
            return Exchange(f"What is the first word: {listed}?", words[0], f"The first word is {words[0]}.")
        case 1:
            return Exchange(f"What is the last word: {listed}?", words[-1], f"The last word is {words[-1]}.")
        case _:
            return Exchange(f"How many words are these: {listed}?", str(len(words)), f"I count {len(words)} words.")


def greeting(source: Source) -> Exchange:
    hello = source.rng.choice(("Hello!", "Hi", "Hello", "Good morning!"))
    return Exchange(hello, "Hello! How can I help you?", "The user greets me.")


def copying(source: Source) -> Exchange:
    """A long answer known in advance, 20 to 260 tokens of corpus text."""
    text = source.passage_text(source.rng.choice(("python", "english")), source.rng.randint(20, 260))
    head = source.rng.choice(("Repeat this text exactly:", "Copy the following text.", "Write this text again:"))
    return Exchange(f"{head}\n\n{text}", text, COPY_THOUGHT)


def table(source: Source) -> Exchange:
    entries = {word: source.code() for word in some_words(source)}
    word = source.rng.choice(list(entries))
    rows = "\n".join(f"{key} | {value}" for key, value in entries.items())
    return Exchange(f"Here is a table.\n{rows}\nWhat is the entry of {word}?", entries[word], f"I look up {word}.")
