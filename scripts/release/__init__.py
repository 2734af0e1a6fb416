"""``make release``: the files of a release, checked, in ``dist/``."""
