"""`python -m mla_cute`: see cli.py."""

from mla_cute.cli import main

if __name__ == "__main__":  # compiler processes of `aot build` import this module under another name
    main(prog_name="python -m mla_cute")
