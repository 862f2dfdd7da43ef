/* Device memory as its two rooms share it: memory.c (whole allocations) and mapped.c (handles, addresses, mappings). */
#ifndef MEMORY_H
#define MEMORY_H

#include "stub.h"

enum { FREE, PLAIN, OPENED, MAPPED };

typedef struct { /* device memory at an address */
    int kind, id, device, fd, users, allowed;
    uint64_t base;
    size_t nbytes;
    CUipcMemHandle blob; /* of OPENED */
    CUhandle handle;     /* of MAPPED */
} Memory;

Memory *memory_at(uint64_t address);                                    /* NULL: there is none */
Memory *new_memory(int kind, uint64_t base, size_t nbytes, int fd);     /* with the lock */
int new_fd(const char *name, size_t nbytes);                            /* a memfd of that size */
int is_exportable(const Memory *memory);                                /* MAPPED, and made to be shown */

#endif
