"""The file `NAME.settings` beside an output: the settings that its records were made with.

Version 1 is an object of settings by fingerprint. Version 2 is {"version": 2, "folders": [...], "settings": {...}},
with settings as in version 1, and the working directories of the runs, to which relative paths in the records refer.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from mmvllm.captioning.errors import explained
from mmvllm.captioning.outputs.atomic_write import replacing
from mmvllm.captioning.settings import CaptionSettings
from mmvllm.captioning.sources.names import MAX_PATH
from mmvllm.errors import ArgumentError
from mmvllm.sampling_params import MAX_COMPLETIONS
from mmvllm.utils.text import beginning_of, load_json, printable

VERSION = 2
MAX_FOLDERS = 100  # working directories to keep; relative paths are looked up in each of them
MAX_SETTINGS = 1000
MAX_SHOWN = 2000  # characters of a difference


class SettingsFile:
    """The settings of an output by fingerprint (`known`), and the working directories of its runs (`folders`)."""

    def __init__(self, path: Path, output: Path):
        self.path, self._output = path, output
        self.known: dict[str, dict[str, Any]] = {}
        self.folders: list[str] = []

    def read(self) -> None:
        """Read the file; raises ArgumentError if it is missing, damaged, or of a later version."""
        try:
            self.known, self.folders = self._parsed(load_json(self.path))
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
        if self.known and not self.fingerprints(settings):
            difference = settings.difference(list(self.known.values())[-1], self.folders)
            raise ArgumentError(
                "{path} was made with other settings: {difference}. Choose another {output}, replace it with "
                "{overwrite}, or add records made with the new settings with {append_anyway}",
                path=self._output,
                difference=beginning_of(printable("; ".join(difference)), MAX_SHOWN),
            )

    def fingerprints(self, settings: CaptionSettings) -> frozenset[str]:
        """Return the fingerprints of settings that equal these; earlier versions computed them from fewer fields."""
        return frozenset(name for name, values in self.known.items() if not settings.difference(values, self.folders))

    def write(self, settings: CaptionSettings) -> None:
        """Add these settings and the working directory, and replace the file."""
        self.known[settings.fingerprint] = dataclasses.asdict(settings)
        self.known = dict([*self.known.items()][-MAX_SETTINGS:])
        if os.getcwd() not in self.folders:
            self.folders.append(os.getcwd())
        content = {"version": VERSION, "folders": self.folders, "settings": self.known}
        with replacing(self.path, synced=True) as file:
            json.dump(content, file, ensure_ascii=False, indent=1)

    def _parsed(self, content: dict[str, Any]) -> tuple[dict[str, dict], list[str]]:
        version = content.get("version", 1)
        if version == 1:
            known, folders = content, []
        elif version == VERSION:
            known, folders = content["settings"], content["folders"]
        else:
            raise ArgumentError(
                "{path} was written by a later version of mmvllm (format {version}, this one reads formats 1 to "
                "{last}); update mmvllm, or choose another {output}",
                path=self.path,
                version=beginning_of(printable(str(version)), 100),
                last=VERSION,
            )
        if len(known) > MAX_SETTINGS:
            raise ValueError(f"it must have at most {MAX_SETTINGS} settings, got {len(known)}")
        if not all(map(_is_path, folders)):
            raise ValueError("a folder is not a path")
        if max(map(_num_captions, known.values()), default=0) > MAX_COMPLETIONS:
            raise ValueError(f"settings make more than {MAX_COMPLETIONS} captions of an image")
        return known, folders[-MAX_FOLDERS:]


def _num_captions(values: Any) -> int:
    """Return how many captions per image the settings make; raises ValueError for values of wrong types."""
    if not isinstance(values, dict):
        raise ValueError("settings are not an object")
    if (files := values.get("caption_files")) is not None and not _is_path(files):
        raise ValueError("caption_files is not a path")
    prompts, n = values.get("prompts") or [], values.get("n", 1)
    if not isinstance(prompts, list) or not all(map(_is_prompt, prompts)):
        raise ValueError("prompts are not a list of objects with a name")
    if type(n) is not int or n < 1:
        raise ValueError("n is not an integer of at least 1")
    return n * max(1, len(prompts))


def _is_path(value: Any) -> bool:
    """Return whether a value can be a path; its length is limited because resolving it takes quadratic time."""
    try:
        return isinstance(value, str) and len(value) <= MAX_PATH and b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def _is_prompt(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str)
