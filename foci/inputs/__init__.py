"""Raw input into sequences: text, images, sound, and the tables that name them."""
