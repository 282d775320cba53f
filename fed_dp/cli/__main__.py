"""`python -m fed_dp.cli`."""

from __future__ import annotations

from fed_dp.cli.main import main

if __name__ == "__main__":
    main()
