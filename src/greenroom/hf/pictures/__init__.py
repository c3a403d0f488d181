"""Pictures in prompts: decoding within limits, their tokens, and their hidden states.

    reader = PictureReader(model, context=4096, most_tokens=1024)  # obstacle: why it reads none
    ids, pictures = reader.read(ids, [EncodedPicture(data, "image/png")])  # in any thread
    features = PictureFeatures(pictures)                 # in the thread that computes
    model(input_ids=..., **pass_options([ids], [0], [features.part(0, len(ids))]))

header    format and size of a picture, from its first bytes
decode    pixels of a picture, by Pillow
prompt    a prompt's pictures: their places, positions, and keys of prefixes
tower     hidden states of pictures, by a model's vision tower
reader    from encoded pictures to a prompt
support   which models read pictures
memory    the memory that all of this takes
"""
