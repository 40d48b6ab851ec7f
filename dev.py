"""Make .venv and run one task in it, with nothing but Python >= 3.10: `python3 dev.py example`, `python3 dev.py test`.

The environment is made from pyproject.toml and constraints.txt, and made anew only when one of them or Python changes.
What follows the task's name goes to its last command: `python3 dev.py test tests/cpu/test_plan.py -x`.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = str(VENV / "bin" / "python")
RECIPE = ("pyproject.toml", "constraints.txt")
CORES = os.cpu_count() or 1
WORKERS = min(8, CORES)  # each loads torch and the compiler: memory, not cores, is the limit
THREADS = {"OMP_NUM_THREADS": str(CORES // WORKERS)}  # of torch, in each worker: more of them than cores only wait

LINT = [[PYTHON, "-m", "ruff", "check", "."], [PYTHON, "-m", "mypy"]]
TASKS = {
    "venv": [],
    "example": [[PYTHON, "examples/decode_loop.py"]],
    "lint": LINT,
    "test": [*LINT, [PYTHON, "-m", "pytest", "-n", str(WORKERS), "--dist", "loadgroup"]],
}


def make_venv() -> None:
    """Create .venv, or leave it alone when its stamp says that it is up to date."""
    stamp = VENV / "stamp"
    recipe = f"{sys.version}\n{ROOT}\n" + "\n".join((ROOT / name).read_text() for name in RECIPE)
    wanted = hashlib.sha256(recipe.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"making {VENV} (a few minutes: torch and the CuTe DSL are large)", flush=True)
    venv.create(VENV, clear=True, with_pip=True)
    pip = [PYTHON, "-m", "pip", "install", "--quiet", "--constraint", "constraints.txt"]
    subprocess.run([*pip, "setuptools"], cwd=ROOT, check=True)
    subprocess.run([*pip, "--no-build-isolation", "--editable", ".[dev]"], cwd=ROOT, check=True)
    # mypy reads no import hooks: this link shows it kernels/ as mla_cute.kernels, which the install makes it.
    types = VENV / "types" / "mla_cute"
    types.mkdir(parents=True)
    (types / "kernels").symlink_to(ROOT / "kernels")
    stamp.write_text(wanted)


def main() -> int:
    if sys.version_info < (3, 10):  # noqa: UP036 - the one file that an older Python may meet
        print(f"Python >= 3.10 is needed, this is {sys.version.split()[0]}; try python3.12 dev.py ...", file=sys.stderr)
        return 2
    task = sys.argv[1] if len(sys.argv) > 1 else ""
    if task not in TASKS:
        print(f"usage: python3 dev.py {'|'.join(TASKS)} [arguments of its last command]", file=sys.stderr)
        return 2
    try:
        make_venv()
        commands = [list(command) for command in TASKS[task]]
        if commands:
            commands[-1] += sys.argv[2:]
        for command in commands:
            print("+", *(Path(command[0]).name, *command[1:]), flush=True)
            subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, **(THREADS if task == "test" else {})})
    except subprocess.CalledProcessError as failure:
        print(f"dev.py: status {failure.returncode} from {' '.join(map(str, failure.cmd))}", file=sys.stderr)
        return failure.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
