model = {
    "block_size": 6,
    "num_draft_layers": 2,
    "target_layer_ids": [1, 4],
    "mask_token_id": 63,
    "num_anchors": 8,
    "markov_rank": 0,
    "confidence_head_alpha": 0.0,
}
