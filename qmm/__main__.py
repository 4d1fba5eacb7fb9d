"""``python -m qmm`` is the ``qmm`` command."""

from qmm.cli import main

if __name__ == "__main__":
    main()
