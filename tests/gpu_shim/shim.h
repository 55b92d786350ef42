/* What libnccl of the shim asks of libcudart of the shim. */
typedef void (*shim_call)(void *);
int shim_enqueue(void *stream, shim_call call, void *data); /* run it when the stream comes to it */
int shim_take(long bytes); /* of the current device's memory */
void shim_give(long bytes);
int gpu_shim_is_broken(void);
