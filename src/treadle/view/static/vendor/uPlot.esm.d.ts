// What the pages use of uPlot, for `tsc`.
export default class uPlot {
  constructor(options: any, data: any, host: HTMLElement);
  data: any[];
  scales: any;
  cursor: any;
  over: HTMLElement;
  setData(data: any, resetScales?: boolean): void;
  setSize(size: {width: number, height: number}): void;
  destroy(): void;
}
