"""The headings of the troubleshooting page are messages that the code still has."""

from __future__ import annotations

import re

import pytest

from tests.docs.blocks import ROOT, outside_of_blocks
from tests.docs.messages import is_in_source

PAGE = ROOT / "docs" / "troubleshooting.md"
QUOTED = [
    (number, message)
    for number, line in outside_of_blocks(PAGE)
    if line.startswith("### ")
    for message in re.findall(r"`([^`]+)`", line)
]


@pytest.mark.parametrize(("line", "message"), QUOTED, ids=[f"troubleshooting.md:{line}" for line, _ in QUOTED])
def test_a_quoted_message_is_in_the_source(line, message):
    assert is_in_source(message), f"docs/troubleshooting.md, line {line}: no text of the source has {message!r}"


def test_every_entry_quotes_a_message():
    headings = [number for number, line in outside_of_blocks(PAGE) if line.startswith("### ")]
    assert headings
    assert headings == sorted({number for number, _ in QUOTED})


def test_a_quotation_is_found_by_its_words():
    assert is_in_source("the training loss is ... in epoch ...; lower the learning rates")
    assert not is_in_source("the training loss is ... in epoch ...; raise the learning rates")
    assert is_in_source("... is empty")
    assert not is_in_source("... is ...")
