"""Prints the adapter's directory, for the server's `--adapter`."""

from penstock_adapter_thinking import DIRECTORY


def main() -> None:
    print(DIRECTORY)


if __name__ == "__main__":
    main()
