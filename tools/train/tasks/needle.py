"""One secret code in a haystack, now and then among other labelled codes that are asked for too."""

from tools.train.tasks.dialog import ANSWER, Dialog, Document
from tools.train.tasks.source import Source
from tools.train.tasks.wording import ANIMALS, OTHER_QUESTIONS, PANGRAMS, QUESTION

QUESTION_TOKENS = 95
"""Room for system, question and answer,"""
LABEL_TOKENS = 75
"""and for each further code with its question and answer."""


def needle(source: Source, tokens: int) -> Document:
    """About `tokens` tokens; loss on the answers."""
    rng = source.rng
    dialog = Dialog(source)
    dialog.system()
    dialog.open_user()
    answer = source.code() if source.chance(0.8) else f"{rng.choice(ANIMALS)}-{rng.randrange(1000, 9999)}"
    form = rng.choices(("[the secret code is {}]", "[the secret code is: {}]", "[secret code: {}]"), (80, 10, 10))[0]
    others: dict[str, str] = {}
    count = other_codes(source, tokens)
    while len(others) < count:
        label = source.word()
        if label != "secret":
            others[label] = source.code()
    lines = [form.format(answer), *(f"[the {label} code is {code}]" for label, code in others.items())]
    rng.shuffle(lines)

    room = tokens - QUESTION_TOKENS - count * LABEL_TOKENS
    places = sorted(
        int(room * (0.8 if not others and source.chance(0.15) else rng.random())) for _ in lines
    )  # 0.8: where the public test puts it
    kind = "pangrams" if source.chance(0.45) else None
    at = 0
    for place, line in zip(places, lines, strict=True):
        dialog.tokens(source.filler(place - at, kind))
        at = place
        if source.chance(0.5):  # inside a word, as where a text is cut by characters
            word = rng.choice(PANGRAMS)
            cut = rng.randint(1, len(word))
            dialog.text(f" {word[:cut]}\n{line}\n{word[cut:]}")
        else:
            dialog.text(f"\n{line}\n")
    dialog.tokens(source.filler(room - at, kind))
    question = QUESTION if source.chance(0.6) else rng.choice(OTHER_QUESTIONS)
    dialog.text("\n\n" + question)
    dialog.close()
    dialog.assistant(answer, f"I look for the secret code in square brackets. It is {answer}.", ANSWER)
    asked = list(others.items())
    rng.shuffle(asked)
    for label, code in asked:
        dialog.user(f"What is the {label} code? Reply with the code only.")
        dialog.assistant(code, f"I look for the {label} code.", ANSWER)
    return dialog.document()


def other_codes(source: Source, tokens: int) -> int:
    if tokens < 600:
        return 0
    return source.rng.choice((0, 0, 1, 2, 4) if tokens < 4096 else (0, 2, 6, 12, 20))
