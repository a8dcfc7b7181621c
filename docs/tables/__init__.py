"""Tables of results in the pages, one module a page: each function makes one table from stored files.

A page asks for one by a comment, `<!-- table: MODULE.FUNCTION -->`; `docs/result_tables.py` writes it.
"""
