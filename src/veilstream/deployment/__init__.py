"""One learner beside real data: rounds, releases, terms; `ledger` for what it must never forget."""
