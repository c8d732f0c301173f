/* Memory that is written for the first time. */

#pragma once

#include <stdint.h>
#include <sys/mman.h>

/* Request huge pages for newly allocated memory: one page fault for 2 MiB is far cheaper than 512 for small pages. The
   system may ignore the request. */
void request_huge_pages(char *memory, int64_t size)
{
#if defined(MADV_HUGEPAGE)
    const uintptr_t page = 1 << 21;
    uintptr_t first = ((uintptr_t)memory + page - 1) / page * page, last = ((uintptr_t)memory + (uintptr_t)size) / page * page;
    if (first < last) madvise((void *)first, last - first, MADV_HUGEPAGE);
#else
    (void)memory, (void)size;
#endif
}
