"""The setting `jpeg_draft` is part of a job's fingerprint, and is not for endpoints."""

import pytest

from mmvllm.captioning.jobs.endpoint_options import check_endpoint
from mmvllm.captioning.settings import CaptionSettings
from mmvllm.errors import ArgumentError


def test_captions_of_drafts_are_not_those_of_full_images():
    assert CaptionSettings(jpeg_draft=False).fingerprint == CaptionSettings().fingerprint
    assert CaptionSettings(jpeg_draft=True).fingerprint != CaptionSettings().fingerprint


def test_an_endpoint_is_sent_no_draft():
    check_endpoint({"jpeg_draft": False})
    with pytest.raises(ArgumentError, match="jpeg_draft is not sent to a server"):
        check_endpoint({"jpeg_draft": True})
