"""Which model answers to which name."""

from collections.abc import Sequence

from services.gateway.engine_client import EngineClient
from services.gateway.errors import model_not_found, unavailable
from services.protocol.events import ModelCard

_ANY = "*"


class ServedModels:
    """The models of the engines that are ready just now. The first one is the main one.

    An alias is a name, or a pattern with one `*`: every name that fits it is taken. Where the part that stands for `*`
    names a served model it is that one, else the main one: with `claude-*`, `claude-NAME` is NAME, and
    `claude-haiku-4-5`, which an agent asks for because it knows no other, is the main one.
    """

    def __init__(self, engines: EngineClient, aliases: Sequence[str]) -> None:
        self._engines = engines
        self._aliases = aliases

    def cards(self) -> list[ModelCard]:
        return self._engines.models()

    def names(self) -> list[tuple[str, ModelCard]]:
        """All names that may be shown with their models: the models' own first, then the aliases'."""
        cards = self.cards()
        own = [(card.name, card) for card in cards]
        patterns = [(a.replace(_ANY, c.name), c) for a in self._aliases if _ANY in a for c in cards]
        plain = [(a, cards[0]) for a in self._aliases if _ANY not in a and cards]
        return own + patterns + plain

    def find(self, name: str) -> ModelCard | None:
        """By its own name or an alias."""
        cards = self.cards()
        by_name = {card.name: card for card in reversed(cards)}
        if name in by_name:
            return by_name[name]
        for alias in self._aliases:
            rest = _fits(alias, name)
            if rest is not None and cards:
                return by_name.get(rest, cards[0])
        return None

    def card(self, name: str | None) -> ModelCard:
        """The card of the asked model, or of the main one where none is named. Raises ApiError."""
        cards = self.cards()
        for card in cards:
            if not name or card.name == name:
                return card
        if not cards or not name or self._engines.known(name):
            raise unavailable(self._missing())
        found = self.find(name)
        if found is None:
            raise model_not_found(name, [card.name for card in cards])
        return found

    def _missing(self) -> str:
        return f"No engine is ready: {self._engines.waiting_for() or 'the one that had this model is gone'}."


def _fits(alias: str, name: str) -> str | None:
    """What stands for `*` in `name` (empty for an alias without one); None where it does not fit."""
    if _ANY not in alias:
        return "" if alias == name else None
    head, _, tail = alias.partition(_ANY)
    if len(name) < len(head) + len(tail) or not name.startswith(head) or not name.endswith(tail):
        return None
    return name[len(head) : len(name) - len(tail)]
