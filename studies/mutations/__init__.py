"""Known ways of getting it wrong, planted in the real code path, and what catches each.

    python -m studies.mutations

A bug is planted by replacing a name of the running program from here, inside a `with`; production
code has no switch for it. Where a guard (ledger, server, grid, type) stands in front, it is shown
to refuse first, and taken away; then the audit looks at what would be sent.
"""
