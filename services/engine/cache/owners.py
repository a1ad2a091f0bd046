"""The sessions whose requests have used what is cached, and how likely each comes back."""

from collections import OrderedDict

from services.protocol import worth
from services.protocol.generate import Standing

REMEMBERED = 4096
"""Sessions; of others, what they left keeps the chance that it had."""
TIPS = 8
"""Ends of contexts a session, at most: those of its requests that run at once, and of a few before."""


class Owner:
    """One session. Pages and checkpoints that it used last share this object, so that a change of its standing is a
    change of theirs."""

    __slots__ = ("requests", "session", "standing", "tips")

    def __init__(self, session: str, standing: Standing = "live") -> None:
        self.session = session
        self.standing: Standing = standing
        self.requests = 0
        """That run or wait."""
        self.tips: OrderedDict[bytes, None] = OrderedDict()
        """Names of the last blocks of its contexts, those used last at the end."""

    @property
    def chance(self) -> float:
        """That what it used is asked for again."""
        return worth.chance(self.standing)

    def begins(self) -> bool:
        """A request of it is there. Returns whether its standing is another now."""
        self.requests += 1
        changed, self.standing = self.standing != "live", "live"
        return changed

    def ends(self, standing: Standing) -> bool:
        """A request of it is over; what the session is then, if that was its last one. Returns whether its standing is
        another now."""
        self.requests -= 1
        return self.becomes(standing)

    def becomes(self, standing: Standing) -> bool:
        """Something was heard of it, which counts unless a request of it is there. Returns whether its standing is
        another now."""
        if self.requests or standing == self.standing:
            return False
        self.standing = standing
        return True

    def ends_at(self, name: bytes) -> None:
        """A context of it ends with this block. `TIPS` are kept."""
        self.tips[name] = None
        self.tips.move_to_end(name)
        if len(self.tips) > TIPS:
            self.tips.popitem(last=False)

    def lost(self, name: bytes, parent: bytes) -> None:
        """A block was given up: where it was the end of a context, the one before it is that now."""
        if name in self.tips:
            del self.tips[name]
            if parent:
                self.ends_at(parent)


class Owners:
    """Sessions by name, the longest unused forgotten first. On the core's thread."""

    def __init__(self) -> None:
        self._owners: OrderedDict[str, Owner] = OrderedDict()

    def of(self, session: str) -> Owner:
        """The owner of this name, made where there is none."""
        owner = self._owners.get(session)
        if owner is None:
            owner = self._owners[session] = Owner(session)
            if len(self._owners) > REMEMBERED:
                self._owners.popitem(last=False)
        self._owners.move_to_end(session)
        return owner

    def known(self, session: str) -> Owner | None:
        return self._owners.get(session)
