"""The file `NAME.settings` beside an output, {"version": 3, "settings": {...}}: its settings by fingerprint."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from mmvllm.captioning.errors import explained
from mmvllm.captioning.outputs.atomic_write import replacing
from mmvllm.captioning.settings import CaptionSettings
from mmvllm.errors import ArgumentError
from mmvllm.sampling_params import MAX_COMPLETIONS
from mmvllm.utils.text import beginning_of, load_json, printable

VERSION = 3  # 1 and 2 were formats before the first release
MAX_SETTINGS = 1000
MAX_SHOWN = 2000  # characters of a difference


class SettingsFile:
    """The settings of an output by fingerprint (`known`)."""

    def __init__(self, path: Path, output: Path):
        self.path, self._output = path, output
        self.known: dict[str, dict[str, Any]] = {}

    def read(self) -> None:
        """Read the file; raises ArgumentError if it is missing, damaged, or of another version."""
        try:
            self.known = self._parsed(load_json(self.path))
        except FileNotFoundError:
            raise ArgumentError(
                "{path} exists and was not made by mmvllm ({settings} is missing); choose another {output}, or replace "
                "the file with {overwrite}",
                path=self._output,
                settings=self.path.name,
            ) from None
        except OSError as error:
            raise ArgumentError("{path} cannot be read: {reason}", path=self.path, reason=explained(error)) from error
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise ArgumentError(
                "{path} is damaged ({reason}); start again with {overwrite}",
                path=self.path,
                reason=printable(str(error)),
            ) from None

    def check(self, settings: CaptionSettings) -> None:
        """Raise ArgumentError with the difference if no record was made with these settings."""
        if self.known and settings.fingerprint not in self.known:
            difference = settings.difference(list(self.known.values())[-1])
            raise ArgumentError(
                "{path} was made with other settings: {difference}. Choose another {output}, replace it with "
                "{overwrite}, or add records made with the new settings with {append_anyway}",
                path=self._output,
                difference=beginning_of(printable("; ".join(difference)), MAX_SHOWN),
            )

    def write(self, settings: CaptionSettings) -> None:
        """Add these settings, and replace the file."""
        self.known[settings.fingerprint] = dataclasses.asdict(settings)
        self.known = dict([*self.known.items()][-MAX_SETTINGS:])
        content = {"version": VERSION, "settings": self.known}
        with replacing(self.path, synced=True) as file:
            json.dump(content, file, ensure_ascii=False, indent=1)

    def _parsed(self, content: dict[str, Any]) -> dict[str, dict]:
        version, known = content.get("version"), content.get("settings", {})
        if version != VERSION:
            raise ArgumentError(
                "{path} was written by another version of mmvllm (its format must be {own}, got {version}); use that "
                "version, or choose another {output}",
                path=self.path,
                version=beginning_of(printable(str(version)), 100),
                own=VERSION,
            )
        if len(known) > MAX_SETTINGS:
            raise ValueError(f"it must have at most {MAX_SETTINGS} settings, got {len(known)}")
        if max(map(_num_captions, known.values()), default=0) > MAX_COMPLETIONS:
            raise ValueError(f"settings make more than {MAX_COMPLETIONS} captions of an image")
        return known


def _num_captions(values: Any) -> int:
    """Return how many captions per image the settings make; raises ValueError for values of wrong types."""
    if not isinstance(values, dict):
        raise ValueError("settings are not an object")
    prompts, n = values.get("prompts") or [], values.get("n", 1)
    if not isinstance(prompts, list) or not all(map(_is_prompt, prompts)):
        raise ValueError("prompts are not a list of objects with a name")
    if type(n) is not int or n < 1:
        raise ValueError("n is not an integer of at least 1")
    return n * max(1, len(prompts))


def _is_prompt(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str)
