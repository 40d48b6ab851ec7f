"""The launcher's choice between plain and packed arguments, compiled for the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_one_of_a_pair_is_taken_with_its_shape() -> None:
    command = [sys.executable, str(Path(__file__).with_name("form_probe.py"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    packed, plain = json.loads(done.stdout.splitlines()[-1])
    # shape and stride of (batch, tokens, heads), rows and stride of an output, and the addresses of both
    assert packed == [1, 7, 4, 576, 8 * 576, 576, 7 * 4, 576, 0, 0]
    assert plain == [2, 3, 5, 3 * 5 * 576, 5 * 576, 576, 2 * 3 * 5, 576, 0, 0]
