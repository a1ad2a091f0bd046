"""Many facts in one message, many questions after it."""

from dataclasses import dataclass

from tools.train.tasks.dialog import ANSWER, Dialog, Document, Mode
from tools.train.tasks.source import Filler, Source

FACT_TOKENS = 22
QUESTION_TOKENS = 42


@dataclass(frozen=True, slots=True)
class Notation:
    """How a fact stands in the text and how it is asked for; {0} is the key, {1} its value."""

    fact: str
    question: str
    capital: bool = False
    """The key starts with a capital."""


BRACKETS = Notation("[the {0} code is {1}]", "What is the {0} code?")
NOTATIONS = (
    BRACKETS,
    BRACKETS,
    Notation('{0} = "{1}"', "What is the value of {0}?"),
    Notation('{{"{0}": "{1}"}}', 'What is the value of "{0}"?'),
    Notation("The code of {0} is {1}.", "What is the code of {0}?"),
    Notation("{0} lives in {1}.", "Where does {0} live?", capital=True),
)
FILLERS: tuple[Filler | None, ...] = ("pangrams", "english", "python", "words", None)
MODES: tuple[Mode | None, ...] = (None, "bare", "empty")


def facts(source: Source, tokens: int) -> Document:
    """About `tokens` tokens; loss on the answers."""
    rng = source.rng
    dialog = Dialog(source)
    dialog.system()
    dialog.open_user()
    notation = rng.choice(NOTATIONS)
    count = rng.randint(8, 40) if tokens > 4096 else max(3, min(48, int(tokens / rng.uniform(45, 90))))
    asked = min(count, rng.randint(6, 30))
    room = tokens - count * FACT_TOKENS - asked * QUESTION_TOKENS - 30
    values: dict[str, str] = {}
    while len(values) < count:
        key = source.word() if source.chance(0.7) else source.pseudo_word()
        values[key.capitalize() if notation.capital else key] = source.code()
    kind = rng.choice(FILLERS)
    for key, value in values.items():
        gap = int(rng.expovariate(1) * room / count) if room > 0 and source.chance(0.8) else 0
        if gap:
            dialog.tokens(source.filler(min(gap, tokens), kind))
            dialog.text("\n")
        dialog.text(notation.fact.format(key, value) + "\n")
    mode = rng.choice(MODES)
    for number, key in enumerate(rng.sample(list(values), asked)):
        if number:
            dialog.open_user()
        else:
            dialog.text("\n")  # the first question belongs to the message of the facts
        dialog.text(notation.question.format(key))
        dialog.close()
        dialog.assistant(values[key], f"I look for {key} in the text.", ANSWER, mode)
    return dialog.document()
