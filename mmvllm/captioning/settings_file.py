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
from mmvllm.captioning.replacing import replacing, sync
from mmvllm.captioning.settings import CaptionSettings
from mmvllm.errors import ArgumentError
from mmvllm.text import parse_json

VERSION = 2


class SettingsFile:
    """The settings of an output by fingerprint (`known`), and the working directories of its runs (`folders`)."""

    def __init__(self, path: Path, output: Path):
        self.path, self._output = path, output
        self.known: dict[str, dict[str, Any]] = {}
        self.folders: list[str] = []

    def read(self) -> None:
        """Read the file; raises ArgumentError if it is missing, damaged, or of a later version."""
        try:
            content = parse_json(self.path.read_text(encoding="utf-8"))
            self.known, self.folders = self._parsed(content)
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
                "{path} is damaged ({reason}); start again with {overwrite}", path=self.path, reason=error
            ) from None

    def check(self, settings: CaptionSettings) -> None:
        """Raise ArgumentError with the difference if no record was made with these settings."""
        if self.known and not self.fingerprints(settings):
            raise ArgumentError(
                "{path} was made with other settings: {difference}. Choose another {output}, replace it with "
                "{overwrite}, or add records made with the new settings with {append_anyway}",
                path=self._output,
                difference="; ".join(settings.difference(list(self.known.values())[-1], self.folders)),
            )

    def fingerprints(self, settings: CaptionSettings) -> frozenset[str]:
        """The fingerprints of the settings that equal these; earlier versions computed them from fewer fields."""
        return frozenset(name for name, values in self.known.items() if not settings.difference(values, self.folders))

    def write(self, settings: CaptionSettings) -> None:
        """Add these settings and the working directory, and replace the file."""
        self.known[settings.fingerprint] = dataclasses.asdict(settings)
        if os.getcwd() not in self.folders:
            self.folders.append(os.getcwd())
        content = {"version": VERSION, "folders": self.folders, "settings": self.known}
        with replacing(self.path) as temporary:
            # Names of folders need not be Unicode: backslashreplace writes such characters as JSON escapes.
            with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
                json.dump(content, file, ensure_ascii=False, indent=1)
            sync(temporary)

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
                version=version,
                last=VERSION,
            )
        if not all(isinstance(values, dict) for values in known.values()):
            raise ValueError("settings are not an object")
        return known, folders
