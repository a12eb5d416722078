/* The loader says how large a page is. */
#ifndef PAGE_SIZE
#define PAGE_SIZE PAGE_BYTES
#endif
