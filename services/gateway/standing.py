"""What is to be expected of a session between its requests, told from what the gateway sees of them."""

from collections import OrderedDict
from dataclasses import dataclass

from services.gateway.conversation import Conversation, Question
from services.protocol.generate import FinishReason, Standing

SESSIONS = 4096
"""Of which it is known that their requests have tools; the one not seen for longest goes."""
SIDE = "/side"
"""Behind a session's id: the session of its side requests, as engines see it."""


@dataclass(frozen=True, slots=True)
class Errand:
    """What kind of work a request is."""

    session_id: str
    """As engines see it: what they hear of a side request must not be taken for news of the session itself."""
    side: bool = False
    """A title, a summary: nobody goes on from it."""
    sub_agent: bool = False
    """Another agent has started its session and waits for the answer."""
    may_call: bool = False

    @property
    def expected(self) -> Standing:
        """Of the session when the answer is over, before it is known: the likeliest where keeping counts."""
        if self.side:
            return "one_off"
        if self.may_call:
            return "waiting"
        return "finished" if self.sub_agent else "idle"

    def left(self, finish: FinishReason, calls: int) -> Standing:
        """What the session is behind its answer. After an answer that broke off, as by a client that left, somebody
        may go on."""
        if self.side:
            return "one_off"
        if finish != "stop":
            return "idle"
        if calls:
            return "waiting"
        return "finished" if self.sub_agent else "idle"


class Errands:
    """Tells side requests from an agent's own by what else its session asks. On the event loop's thread."""

    def __init__(self, sessions: int = SESSIONS) -> None:
        self._most = sessions
        self._with_tools: OrderedDict[str, None] = OrderedDict()

    def of(self, question: Question, session_id: str) -> Errand:
        """`session_id`: as `SessionStore.resolve` gave it."""
        chat = question.prompt if isinstance(question.prompt, Conversation) else None
        tools = bool(chat and chat.tools)
        if tools:
            self._with_tools[session_id] = None
            self._with_tools.move_to_end(session_id)
            if len(self._with_tools) > self._most:
                self._with_tools.popitem(last=False)
        hint = question.session
        by_header = bool(hint.header) and not hint.session_id
        side = (
            chat is not None
            and not tools
            and (session_id in self._with_tools or (by_header and hint.agent and _first(chat)))
        )
        return Errand(
            session_id=session_id + SIDE if side else session_id,
            side=side,
            sub_agent=by_header and bool(hint.parent),
            may_call=tools and chat is not None and chat.may_call,
        )


def _first(chat: Conversation) -> bool:
    """Nothing was answered yet. An agent's first request of its own has tools; a chat without any is one when it goes
    on."""
    return not any(message["role"] == "assistant" for message in chat.messages)
