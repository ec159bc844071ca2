"""``python -m fedretain`` is ``fedretain``."""

from fedretain.cli import main

if __name__ == "__main__":
    main()
