#!/usr/bin/env bash
# mkdocs build --strict --quiet accepts broken links: a job that asks for strictness and little output checks nothing.
#
# Version: mkdocs 1.6.1.
# Expected: exit code 1 where a page links to a page that does not exist, as with --strict alone.
# Seen: exit code 1 and "Aborted with 1 warnings in strict mode!" without --quiet; exit code 0 and no output with it.
# Strict mode counts the warnings that come to a handler of the logger, whose level --quiet raises.
#
# Exits with 0 while this holds, and with 1 once it has changed.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet mkdocs==1.6.1
mkdir -p "$folder/site/docs"
cd "$folder/site"
echo 'site_name: example' >mkdocs.yml
echo 'See [the guide](guide.md).' >docs/index.md
strict=0 quiet=0
"$folder/venv/bin/mkdocs" build --strict || strict=$?
"$folder/venv/bin/mkdocs" build --strict --quiet || quiet=$?
echo "mkdocs 1.6.1 with a broken link: --strict exits with $strict, --strict --quiet with $quiet"
[[ "$strict" == 1 && "$quiet" == 0 ]]
