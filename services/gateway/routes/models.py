"""GET /v1/models, /v1/models/{id} and llama.cpp's /props: what is served just now."""

from datetime import UTC, datetime
from typing import Annotated, Literal

from litestar import get
from litestar.handlers import HTTPRouteHandler
from litestar.params import Parameter
from msgspec import Struct

from services.gateway.errors import model_not_found
from services.gateway.openapi.described import KEY, Described
from services.gateway.served import ServedModels
from services.protocol.events import ModelCard


class Model(Struct, frozen=True, kw_only=True):
    """What OpenAI's clients read and what Anthropic's do."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    display_name: str
    created: int
    """Unix seconds."""
    created_at: datetime
    owned_by: str = "samovar"
    max_model_len: int
    """Prompt + output tokens at most, as vLLM names it; agents read their context window here."""
    context_length: int
    """The same, as OpenRouter names it."""


class ModelList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]
    """The main model first, aliases last: some clients take the first for the only one."""
    has_more: bool = False
    first_id: str | None
    last_id: str | None


class CodexModel(Struct, frozen=True, kw_only=True):
    slug: str
    display_name: str
    context_window: int
    supported_in_api: bool = True


class CodexModels(Struct, frozen=True, kw_only=True):
    """As Codex asks for it, with its version in the query."""

    models: list[CodexModel]


class GenerationSettings(Struct, frozen=True):
    n_ctx: int


class Modalities(Struct, frozen=True):
    vision: bool = False
    audio: bool = False


class Props(Struct, frozen=True, kw_only=True):
    """What agents that take this for a llama.cpp server read of the main model."""

    default_generation_settings: GenerationSettings
    model_alias: str
    modalities: Modalities = Modalities()


def model_routes(served: ServedModels) -> list[HTTPRouteHandler]:
    @get(["/v1/models", "/models"], opt={KEY: Described(summary="The models that are served")})
    async def list_models(
        client_version: Annotated[str, Parameter(description="Set by Codex only")] = "",
    ) -> ModelList | CodexModels:
        if client_version:
            return CodexModels(models=[_codex(card) for card in served.cards()])
        models = [_model(name, card) for name, card in served.names()]
        return ModelList(
            data=models, first_id=models[0].id if models else None, last_id=models[-1].id if models else None
        )

    # A model's name may hold slashes, as hub ids do.
    @get("/v1/models/{model_id:path}", opt={KEY: Described(summary="One model", errors=(404,))})
    async def get_model(model_id: Annotated[str, Parameter(description="A model's name")]) -> Model:
        name = model_id.removeprefix("/")
        card = served.find(name)
        if card is None:
            raise model_not_found(name, [card.name for card in served.cards()])
        return _model(name, card)

    @get(["/props", "/v1/props"], opt={KEY: Described(summary="The main model, as llama.cpp tells it", errors=(503,))})
    async def props() -> Props:
        card = served.card(None)
        return Props(default_generation_settings=GenerationSettings(card.max_model_len), model_alias=card.name)

    return [list_models, get_model, props]


def _model(name: str, card: ModelCard) -> Model:
    return Model(
        id=name,
        display_name=card.name,
        created=card.created,
        created_at=datetime.fromtimestamp(card.created, UTC),
        max_model_len=card.max_model_len,
        context_length=card.max_model_len,
    )


def _codex(card: ModelCard) -> CodexModel:
    return CodexModel(slug=card.name, display_name=card.name, context_window=card.max_model_len)
