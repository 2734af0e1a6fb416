#!/bin/sh
# In place of python, for ranks that torchrun starts (PYTHON_EXEC): run-deepspeed takes a script or -m and a module too.
[ "$1" = -u ] && shift
exec "${LONGSHORE_PYTHON:-python3}" -u -m longshore run-deepspeed "$@"
