"""The launcher's choice between plain and packed arguments, compiled for the CPU."""

from __future__ import annotations

import json

from .toy import run


def test_one_of_a_pair_is_taken_with_its_shape() -> None:
    printed = run(f"from {__package__} import form_probe; form_probe.main()")
    packed, plain = json.loads(printed.splitlines()[-1])
    # shape and stride of (batch, tokens, heads), and the address
    assert packed == [1, 7, 4, 576, 8 * 576, 576, 0]
    assert plain == [2, 3, 5, 3 * 5 * 576, 5 * 576, 576, 0]
