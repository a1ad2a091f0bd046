"""GET /v1/models and /v1/models/{id}: what is served just now."""

from typing import Annotated, Literal

from litestar import get
from litestar.handlers import HTTPRouteHandler
from litestar.params import Parameter
from msgspec import Struct

from services.gateway.engine_client import EngineClient
from services.gateway.errors import model_not_found
from services.protocol.events import ModelCard


class Model(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    """Unix seconds."""
    owned_by: str = "samovar"
    max_model_len: int
    """Prompt + output tokens at most, as vLLM names it; agents read their context window here."""
    context_length: int
    """The same, as OpenRouter names it."""


class ModelList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


def model_routes(engines: EngineClient) -> list[HTTPRouteHandler]:
    @get("/v1/models")
    async def list_models() -> ModelList:
        return ModelList(data=[_model(card) for card in engines.models()])

    # A model's name may hold slashes, as hub ids do.
    @get("/v1/models/{model_id:path}")
    async def get_model(model_id: Annotated[str, Parameter(description="A model's name")]) -> Model:
        name = model_id.removeprefix("/")
        cards = engines.models()
        for card in cards:
            if card.name == name:
                return _model(card)
        raise model_not_found(name, [card.name for card in cards])

    return [list_models, get_model]


def _model(card: ModelCard) -> Model:
    return Model(
        id=card.name, created=card.created, max_model_len=card.max_model_len, context_length=card.max_model_len
    )
