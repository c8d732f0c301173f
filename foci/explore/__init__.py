"""The explorer: a local web server that runs a model on a text, an image or a sound and shows its attention.

    foci explore

It listens on 127.0.0.1 only, and its address contains a secret.

access: check requests and bound their size
model_runner: load models and record their attention
jobs: run models in the background and keep their records
server: the web application
"""
