"""``python -m scripts.docs``: write what of docs/ is generated. With ``--check`` it only says what is out of date."""

from __future__ import annotations

import sys

from scripts.docs.generated import DOCS, GENERATED


def main(arguments: list[str]) -> int:
    """Returns the exit code: 1 where something was out of date and was only checked."""
    stale = []
    for name, content in GENERATED.items():
        path, new = (DOCS / name).resolve(), content()
        if path.exists() and path.read_text() == new:
            continue
        stale.append(path.relative_to(DOCS.parent))
        if arguments != ["--check"]:
            path.parent.mkdir(exist_ok=True)
            path.write_text(new)
    for name in stale:
        print(f"{name}: {'run python -m scripts.docs' if arguments == ['--check'] else 'written'}")
    return int(bool(stale) and arguments == ["--check"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
