"""Small trained models that ship with the package, one folder each: weights, config, score, data and licence.

pretrained: lists and loads them; `foci.pretrained(name)` is the public function
untrained: untrained vectors for a sentence, which show how attention works
"""
