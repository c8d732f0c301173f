"""`python -m foci` is `foci`."""

from foci.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
