"""The `foci` command: one file per command, each with `add` (its options) and `run`.

main: parses the arguments and runs one command
unknown_options: errors for misspelt options and for settings without --set
output: checks of paths and texts, exit statuses, messages on stderr
explain: attention step by step on a sentence
explain_page: the page that `foci explain` prints
look: run a model on a text and show its attention
explore: `foci explore` and `foci view`, in the browser
samples: write small data files to try the commands with
data: check a dataset
train: train a model or resume a run
settings_help: the list of settings for `foci train --settings`
model_choice: find and load the model that a command names
evaluate: score a trained model
run: answer inputs with a trained model
doctor: installed packages, devices and the backend of each call
warmup: compile kernels before their first use
bench: run a benchmark of the source checkout
"""
