"""What the library needs from PyTorch, the compiler, the file system and the terminal.

tracing: compilers, torch.func transforms, CUDA graph capture and autocast around a call.
operators: operators of PyTorch, registered when a compiler traces or a program names one.
saved_graphs: registers the operators before a saved graph is loaded.
call_observer: the function that sees the calls inside compiled models.
checks: checks of tensors against the sizes of a call.
tensor_cache: tensors that follow from plain numbers, made once.
device: properties of the GPU.
default_device: prepares data on the CPU, whatever the default device is.
interception: hands attention calls to `foci.watch` blocks.
interrupts: delays Ctrl+C.
compile_switch: switches torch.compile off while a model is watched.
cuda_graphs: captures work as a CUDA graph.
double_backward: gradients that are differentiated again.
native: compiles and loads the C sources of `foci/kernels/c`.
durable_files: files that survive a crash and reveal damage.
safetensors_file: writes safetensors files with a header and a checksum.
console: text for a terminal: widths, colors, pages.
printable: any text in a form that is safe to print.
spelling: the name that a misspelt one was meant to be.
argument_names: errors for arguments that a function does not have.
limits: bounds on what a file may expand to.
json_text: JSON of files, bounded in length and depth.
"""
