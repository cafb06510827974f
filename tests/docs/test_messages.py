"""The headings of the troubleshooting page are messages that the code still has."""

from __future__ import annotations

import re

from tests.docs.blocks import ROOT, outside_of_blocks
from tests.docs.messages import is_in_source

PAGE = ROOT / "docs" / "troubleshooting.md"


def test_every_entry_quotes_messages_of_the_source():
    headings = [(number, line) for number, line in outside_of_blocks(PAGE) if line.startswith("### ")]
    quoted = [(number, message) for number, line in headings for message in re.findall(r"`([^`]+)`", line)]
    assert len(quoted) > 100
    assert sorted({number for number, _ in quoted}) == [number for number, _ in headings]
    missing = {number: message for number, message in quoted if not is_in_source(message)}
    assert not missing, f"docs/troubleshooting.md: no text of the source has these messages (by line): {missing}"


def test_a_quotation_is_found_by_its_words():
    assert is_in_source("the training loss is ... in epoch ...; lower the learning rates")
    assert not is_in_source("the training loss is ... in epoch ...; raise the learning rates")
    assert is_in_source("... is empty")
    assert not is_in_source("... is ...")
