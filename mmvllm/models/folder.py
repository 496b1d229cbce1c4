"""Find the folder of a checkpoint and refuse unsupported ones by their files alone, without importing torch."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mmvllm.models.hf_config import quantization_of
from mmvllm.models.registry import read_config
from mmvllm.utils.arguments import check_key
from mmvllm.utils.text import load_json, some_of, without_logins

BUNDLED = Path(__file__).parent.parent / "assets" / "demo"
BUNDLED_NAME = "bundled"
CONFIGS = ("*.json", "*.txt", "*.jinja")


def model_name(model: str | Path | None) -> str:
    """Return the name of a model, as the user wrote it."""
    return BUNDLED_NAME if model is None else str(model)


def check_model(model: str | Path | None, with_weights: bool) -> None:
    """Raise ValueError if the configuration or the file names show that the model is not supported.

    For a hub id, only `config.json` is downloaded.
    """
    folder = _local_folder(model)
    raw = read_config(_hub_config(model) if folder is None else folder)[1]
    if with_weights:
        try:
            quantization_of(raw)
        except ValueError as error:
            raise ValueError(f"{folder or model}: {error}") from None
        if folder is not None:
            weight_files(folder)


def resolve_folder(model: str | Path | None, with_weights: bool = True) -> Path:
    """Return the folder of a checkpoint: the bundled one for None, a local folder, or the download of a hub id.

    Offline mode (HF_HUB_OFFLINE) is respected and cached files are used. Pickled weights, and weights of an unsupported
    architecture, are never downloaded.
    """
    if (folder := _local_folder(model)) is not None:
        return folder
    from huggingface_hub import snapshot_download

    read_config(_hub_config(model))
    with _hub_errors(model):
        return Path(snapshot_download(str(model), allow_patterns=[*CONFIGS, *["*.safetensors"] * with_weights]))


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint; raise ValueError if there are none or some are missing."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        files = [single]
    elif index.is_file():
        files = sorted({folder / name for name in _weight_map(index).values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        found = some_of(sorted(path.name for path in folder.iterdir()), 20) or "nothing"
        raise ValueError(
            f"{folder} has no *.safetensors weights (found: {found}); mmvllm loads no pickled weights. "
            "For random weights pass load_format='dummy'"
        )
    if missing := [path.name for path in files if not path.is_file()]:
        raise ValueError(f"{folder} lacks {some_of(missing, 20)}, which {index.name} names; download it again")
    return files


def _weight_map(index: Path) -> dict[str, str]:
    try:
        names = dict(load_json(index)["weight_map"])
        for name in names.values():
            if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
                raise ValueError(f"weight_map must name files of this folder, got {name!r:.50}")
        return names
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{index} is damaged: {error!r}; download it again") from None


def _local_folder(model: str | Path | None) -> Path | None:
    """Return the local folder, or None for a hub id; raise ValueError for anything else."""
    if model is None:
        return BUNDLED
    try:
        folder = Path(model).expanduser()
        if folder.is_dir():
            return folder
    except (OSError, RuntimeError) as error:  # a name that is too long, an unknown home
        raise ValueError(_unavailable(model, str(error))) from None
    if "/" not in str(model):  # no supported repository on the hub has such a name, and asking the hub takes long
        raise ValueError(_neither(model))
    return None


def _hub_config(model: str | Path) -> Path:
    """Download the `config.json` of a hub id and return its folder."""
    from huggingface_hub import hf_hub_download

    with _hub_errors(model):
        return Path(hf_hub_download(str(model), "config.json")).parent


@contextmanager
def _hub_errors(model: str | Path) -> Iterator[None]:
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError

    for handler in logging.getLogger("huggingface_hub").handlers:  # its warnings show URLs
        handler.addFilter(_hide_logins)  # adding it again changes nothing
    is_sent = not (constants.HF_HUB_OFFLINE or constants.HF_HUB_DISABLE_IMPLICIT_TOKEN)
    if is_sent and (token := get_token()):  # the HTTP library's error would show it
        check_key("the token for the hub (HF_TOKEN, or from `hf auth login`)", token)
    try:
        yield
    except HFValidationError:
        raise ValueError(_neither(model)) from None
    except (OSError, ValueError, RuntimeError) as error:  # the hub's exceptions are OSErrors
        reason = without_logins(str(error))  # HF_ENDPOINT may have a login
        if constants.HF_HUB_OFFLINE and isinstance(error, FileNotFoundError):
            reason = "it is not in the cache, and HF_HUB_OFFLINE sets offline mode"
        raise ValueError(_unavailable(model, reason)) from None
    except Exception as error:  # from the HTTP library, whose text may show a part of a proxy's login
        reason = f"{type(error).__name__}; if HTTPS_PROXY or HF_ENDPOINT is set, check that it is a URL"
        raise ValueError(_unavailable(model, reason)) from None


def _hide_logins(record: logging.LogRecord) -> bool:
    record.msg, record.args = without_logins(record.getMessage()), None
    return True


def _neither(model: str | Path) -> str:
    return f"model {str(model)!r} is neither a local folder nor a hub id like 'Qwen/Qwen2-VL-2B'"


def _unavailable(model: str | Path, reason: str) -> str:
    reason = reason.strip().rstrip(".")
    return f"model {str(model)!r} is not a local folder and cannot be downloaded from the hub: {reason}"
