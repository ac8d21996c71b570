"""The checkpoint's tokenizer as deepseek-recipe needs it, checked against `tokenizers`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from deepinfer_jax.errors import ConfigError, TokenizerError

if TYPE_CHECKING:
    import deepseek_recipe
    import tokenizers

    from deepinfer_jax.config.model import ModelConfig

RECIPE = "deepseek-recipe>=0.2,<0.3"
_NOT_IMAGE = (
    *("Bos", "Eos", "ThinkingStart", "ThinkingEnd", "System", "User", "Assistant", "Dsml"),
    *("LatestReminder", "Ref", "RefEnd", "Box", "BoxEnd", "Point", "PointEnd", "Polygon"),
    "PolygonEnd",
)
# Plain text of several scripts, line ends, digits, and half a special token.
_PROBES = ("", "Hello!\r\n\n  x", "São 北京 かな 🎉 e\u0301", "12345.678", "<\uff5cUser \t</div>")


def import_recipe() -> Any:
    """Returns the `deepseek_recipe` module.

    Raises:
        ConfigError: It is not installed, or has another interface than the one used here.
    """
    try:
        recipe = import_module("deepseek_recipe")
    except ImportError as error:
        raise ConfigError(
            f"chat prompts need {RECIPE}, and importing it failed with: {error}. "
            f'Install it: pip install "{RECIPE}"'
        ) from error
    if not recipe.__version__.startswith("0.2."):
        raise ConfigError(
            f"chat prompts need {RECIPE}, version {recipe.__version__} is installed and may render "
            f'differently: pip install "{RECIPE}"'
        )
    return recipe


def recipe_tokenizer(tokenizer: "tokenizers.Tokenizer") -> "deepseek_recipe.Tokenizer":
    """Returns recipe's tokenizer of the same tokenizer.json.

    Raises:
        TokenizerError: recipe cannot read it, or gives other ids than `tokenizers` does.
    """
    try:
        converted = import_recipe().Tokenizer.from_str(tokenizer.to_str())
    except RuntimeError as error:
        raise TokenizerError(
            f"deepseek-recipe must read the checkpoint's tokenizer.json, and reports: {error}"
        ) from error
    for text in (*_PROBES, *_added(tokenizer).values()):
        expected = tokenizer.encode(text, add_special_tokens=False).ids
        received = converted.encode(text)
        if received != expected:
            raise TokenizerError(
                f"deepseek-recipe and tokenizers must give the same ids, but {text!r} is "
                f"{received} and {expected}: a version of one of them does not support this "
                "tokenizer.json"
            )
    return converted


def special_tokens(
    tokenizer: "tokenizers.Tokenizer", config: "ModelConfig"
) -> "deepseek_recipe.SpecialTokens":
    """Returns the spelling of every special token; that of the image token is looked up by its id.

    Raises:
        TokenizerError: A token that every prompt of this model may need is not in tokenizer.json,
            or the beginning or end of a text has another id there than in config.json.
    """
    recipe = import_recipe()
    kinds = recipe.SpecialToken
    added = _added(tokenizer)
    image = None
    if config.image_token_id is not None:
        image = added.get(config.image_token_id)
        others = {getattr(kinds, kind).default_str() for kind in _NOT_IMAGE}
        if image is None or image in others:
            raise TokenizerError(
                f"config.image_token_id={config.image_token_id} must be the image token of "
                f"tokenizer.json, and is {image!r}: the two files belong to different checkpoints"
            )
    specials = recipe.SpecialTokens(image=image)
    needed = [kinds.Bos, kinds.Eos, kinds.ThinkingStart, kinds.ThinkingEnd, kinds.User]
    needed += [kinds.Assistant, kinds.Dsml]
    if config.model_type != "deepseek_v4":
        needed.append(kinds.System)
    spelled = set(added.values())
    missing = [specials.token(kind) for kind in needed if specials.token(kind) not in spelled]
    if missing:
        raise TokenizerError(
            f"a {config.model_type} prompt needs these added tokens, and tokenizer.json lacks "
            f"them: {missing}. Use the tokenizer.json published with the checkpoint"
        )
    for field, kind in (("bos_token_id", kinds.Bos), ("eos_token_id", kinds.Eos)):
        expected, received = getattr(config, field), tokenizer.token_to_id(specials.token(kind))
        if received != expected:
            raise TokenizerError(
                f"config.{field} must be the id of {specials.token(kind)!r} in tokenizer.json, got "
                f"{expected} and {received}: the two files belong to different checkpoints"
            )
    return specials


def _added(tokenizer: "tokenizers.Tokenizer") -> dict[int, str]:
    return {id: token.content for id, token in tokenizer.get_added_tokens_decoder().items()}
