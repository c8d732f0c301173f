"""The explorer: a page on this machine where one types a text, picks a model, and looks.

    foci explore

It listens on 127.0.0.1 only, behind a secret in its address. `explore -> capture, record, view`.
"""
