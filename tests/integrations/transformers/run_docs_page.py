"""Runs the snippets of docs/integrations/transformers.md, in the folder that the argument names."""

from __future__ import annotations

import os
import sys

from tests.integrations.environments import report
from tests.integrations.page_snippets import run_page
from tests.integrations.transformers.models import Tokens, tiny_llama

os.chdir(sys.argv[1])
report(run_page("docs/integrations/transformers.md", {"model": tiny_llama(), "dataset": Tokens(8)}))
