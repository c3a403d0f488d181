"""Pictures in prompts: decoding within limits, their tokens, and their hidden states.

    reader = PictureReader(model, context=4096, most_tokens=1024)    # reader.obstacle: why it cannot
    ids, pictures = reader.read(ids, [EncodedPicture(data, "image/png")])  # in any thread
    features = PictureFeatures(pictures, reader.tower)               # in the thread that computes
    model(input_ids=..., **pass_options(reader.tower, [ids], [features.part(0, len(ids))]))

header    format and size of a picture, from its first bytes
decode    pixels of a picture, by Pillow
prompt    a prompt's pictures: their places, positions, and keys of prefixes
tower     hidden states of pictures, by a model's vision tower
reader    from encoded pictures to a prompt
memory    the memory that all of this takes
"""
