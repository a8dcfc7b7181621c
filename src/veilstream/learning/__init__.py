"""The algorithm, once: local round, server update, tasks, methods, regret, theory."""
