"""Records the attention of any model: `watch`, `look` and `Monitor`.

watch: the context manager; checks its arguments, registers hooks, intercepts attention calls.
torch_functions: runs intercepted calls and reports them with their lazy weights.
multi_head_attention: the same for F.multi_head_attention_forward.
head_ablation: zeros the outputs of ablated heads.
monitor: the statistics of every head while a model trains.
alerts: statistics of heads beyond their thresholds.
statistics_writers: writes monitored statistics to TensorBoard, Weights & Biases or a function.
compiled_statistics: statistics of the calls inside compiled models.
compiled_watch: blocks of `watch` in which a compiled model runs compiled.
qk_clip: rescales the projections of heads with large logits.
huggingface: switches transformers models to foci inside the block.
errors: CaptureError, for a call that cannot be recorded.
hooks: forward hooks that are gone after the block, whatever happens.
recorder: collects the calls of one block.
module_tracker: which modules run and attend, in which pass.
model_structure: the modules of a model and their names, found once and checked in every block.
head_selection: the recorded and the ablated heads.
record_filling: makes the layers and labels of the Record when the block ends.
naming: derives layer names (stack, index, axis labels) from module names.
patches: finds the grid of patches of a vision model from its first convolution.
windows: finds the windows of Swin and MaxViT on the grid of patches.
diffusion: the denoising steps of a diffusion model, its prompt and its grid of latent patches.
cross_attention: tells cross-attention from self-attention by the inputs of a module.
token_ids: collects the token ids that the model reads, for the labels.
log_book: which call continues which log, and the limit of bytes.
layer_log: collects the calls of one layer and builds its Layer.
text_weights: which queries and keys are text, where only the weights on text are kept.
pending_statistics: plain calls, and statistics of several layers in one pass.
generation_steps: joins the steps of a generation into one matrix.
host_copy: copies statistics to the host in the background.
look: runs a model on a text and records it.
model_loading: finds and loads the model that `look` runs.
"""
