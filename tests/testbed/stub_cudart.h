/* What the stub NCCL needs of the stub CUDA runtime beside its public functions. */
#ifndef STUB_CUDART_H
#define STUB_CUDART_H

#include <stdint.h>

/* Runs work(argument) on the stream's own thread, after all that was enqueued before it. */
void stubStreamEnqueue(void *stream, void (*work)(void *argument), void *argument);

/* The GPU of the calling thread, as nvidia-smi numbers it. */
int stubPhysicalDevice(void);

/* Nanoseconds of CLOCK_MONOTONIC. */
uint64_t stubNow(void);

#endif
