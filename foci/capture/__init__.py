"""Any model to a Record: `watch`, and one file per ecosystem."""
